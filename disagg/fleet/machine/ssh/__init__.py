"""A machine over SSH, on fabric and paramiko.

machine      the Machine interface over one SSH connection
guard        kills the commands of a client that is gone
connection   opens a connection: host key check, login, timeouts
settings     user, port, keys and proxies, from hosts.toml and ~/.ssh/config; keys: private keys
known_hosts  reads and writes ~/.ssh/known_hosts; trust: the host keys for `disagg trust` to accept
errors       converts paramiko's exceptions to disagg's
command      the `ssh` command line for `disagg ssh`
"""
