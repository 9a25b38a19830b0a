"""Classes and values of an application state, without pickle."""

from ckptstore.core.identity import IdentityDict
from ckptstore.state import stateful
from ckptstore.state.codecs import containers, values
from ckptstore.state.flatten import flatten
from ckptstore.state.inflate import children_of, inflate, refuse_pickles
from ckptstore.state.stateful import (
    RNGState,
    StateDict,
    Stateful,
    class_name,
    found_in,
    is_stateful,
    items_of,
    no_classes,
    register_class,
    register_value,
    registered,
    registered_classes,
)
