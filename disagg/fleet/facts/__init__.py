"""What a host is and has: probes (POSIX scripts), and the frozen values parsed from what they print.

probe     runs a probe and splits its lines; probe.sh: what all probes share
host      host.sh: system, pythons, service managers, what is deployed
hardware  memory, GPUs and clock of a host
server    server.sh: the host's server, its service manager, ports and log
contents  contents.sh: everything of disagg on a machine, of all hosts and fleets
route     route.sh: the network interface that leads to an address
checks    checks.sh: lines for sh whose exit code states whether something is as it should be
python    a Python on the host, and small programs run with it
paths     where files lie on a host
findings  the result of a check, with a hint
"""
