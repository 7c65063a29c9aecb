"""What a host is and has. Each module has one probe (a POSIX script of the same name) and one parser.

host      system, architecture, pythons, disk, what is deployed
server    the host's server: process, release, service manager, ports, log
hardware  memory, GPU, clock, macOS permissions
route     which network interface leads to an address
python    a Python on the host, and small programs run with it
layout    where files lie on a host
findings  what an examination found, as a value
"""
