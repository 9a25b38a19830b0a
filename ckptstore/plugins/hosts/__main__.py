"""`python -m ckptstore.plugins.hosts DIRECTORY`: the agent of a host."""

from ckptstore.plugins.hosts.agent import main

main()
