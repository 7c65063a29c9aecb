"""What is on the fleet's machines and belongs to no host of hosts.toml any more.

orphans   contents of a machine and hosts.toml -> what is left over there. Pure
pruning   finds it on all machines, and removes it
"""
