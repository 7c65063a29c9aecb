"""A machine over SSH, on fabric and paramiko.

machine      the Machine interface over one SSH connection
guard        kills the commands of a client that is gone
connection   opens a connection: host key check, private keys, login; the host keys that `disagg trust` accepts
settings     user, port, keys and proxies, from hosts.toml and ~/.ssh/config; the command line of `disagg ssh`
known_hosts  reads and writes ~/.ssh/known_hosts
errors       converts paramiko's exceptions to disagg's
"""
