"""A machine: run a command, move files, nothing else.

base          the Machine interface, its results and errors
posix         what every POSIX machine does the same way; shell: quoting; output: bounds; tree: folders as one stream
local         this machine; ssh/: a machine over SSH
connect       host -> Machine, and one action on many hosts at the same time
interruption  ends remote commands when the caller is interrupted
process       processes and ports of this machine
"""
