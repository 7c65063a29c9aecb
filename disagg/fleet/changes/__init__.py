"""Changes of a host: who may make one, whose token it has, which release waits for a restart.

lock          one command at a time per host, whichever machine it comes from
fleet_locks   the locks of all hosts that a command changes
audit         which command changed a host, when, and how it ended
tokens        whose token a host has
links         which release is deployed, runs, ran before, or waits for a restart
hooks         commands of this machine before and after a change
"""
