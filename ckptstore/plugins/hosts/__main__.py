"""`python -m ckptstore.plugins.hosts DIRECTORY SOCKET`: the agent of a host."""

from ckptstore.plugins.hosts.agent import main

main()
