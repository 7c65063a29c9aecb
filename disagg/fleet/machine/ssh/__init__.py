"""A machine over SSH, on fabric and paramiko.

machine      the Machine interface over one SSH connection
connection   opens it: host key check, login, timeouts
settings     user, port, keys and proxies, from hosts.toml and ~/.ssh/config; keys: private keys
known_hosts  reads and writes ~/.ssh/known_hosts; trust: adds a host's key after a person agreed
errors       paramiko's failures as one line with a hint
command      the `ssh` command line for a person
"""
