"""A machine: run a command, move files, nothing else.

machine       what can be done on a machine, through its shell: what is sent, and what comes back
local         this machine; ssh/: a machine over SSH
upload        files to a machine, as one archive or by parts, and how far they have come
connect       host of hosts.toml -> Machine; the machines of a command, connected until its end
fan_out       one action on many hosts at the same time
listening     a program that runs on a machine while the caller connects to its port
interruption  interrupts the waits of other threads
process       processes and ports of this machine
"""
