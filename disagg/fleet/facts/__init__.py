"""What a host is and has: probes (POSIX scripts), and the frozen values parsed from what they print.

probe     runs a probe and splits its lines
host      host.sh: system, memory, GPUs, clock, pythons, service managers, what is deployed
server    server.sh: the host's server, its service manager, ports and log; machine_content.sh: all of a machine
python    a Python on the host, and small programs run with it
paths     where files lie on a host
findings  the result of a check, with a hint
"""
