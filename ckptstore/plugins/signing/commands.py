"""`ckptstore sign` and `verify`: who stands behind a commit."""

from ckptstore.cli.call import Answer, Call, UsageError
from ckptstore.cli.commits import commit_text, document_of, find_proven
from ckptstore.plugin.text import ID_DIGITS
from ckptstore.plugins.signing import signatures


def sign(call: Call) -> Answer:
    args = call.args
    if args.new_key is not None:
        if args.ref is not None or args.key is not None:
            raise UsageError("--new-key makes a key, and signs nothing")
        key = signatures.new_key(args.new_key)
        public = f"{args.new_key}.pub is for those who verify"
        page = [f"key {key[:ID_DIGITS]} is in {args.new_key}; {public}"]
        return Answer({"key": key, "path": args.new_key}, page)
    if args.ref is None or args.key is None:
        raise UsageError("REF and --key FILE say what to sign with what")
    store = call.open(args.ref)
    store.check_writable()
    info = find_proven(call, store, args.ref)
    document_of(store, info)
    key = signatures.sign(store.storage, info.id, args.key)
    page = [f"{commit_text(info)} is signed by {key[:ID_DIGITS]}"]
    return Answer({"commit": info.id, "key": key}, page)


def verify(call: Call) -> Answer:
    args = call.args
    if not args.keys:
        raise UsageError("--keys FILE is missing: public keys that you trust")
    store = call.open(args.ref)
    info = find_proven(call, store, args.ref)
    document_of(store, info)
    keys = signatures.verify(store.storage, info.id, args.keys)
    text = ", ".join(key[:ID_DIGITS] for key in keys)
    return Answer({"commit": info.id, "keys": keys}, [f"{commit_text(info)} is signed by {text}"])
