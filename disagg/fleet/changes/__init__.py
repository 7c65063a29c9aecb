"""Changes of a host: who may make one, who has made one, which release waits for a restart.

locks         one command at a time per host, and of all hosts that it changes, whichever machine it comes from
audit         which command changed a host, when, and how it ended
links         which release is deployed, runs, ran before, or waits for a restart
state_files   files of this machine, written in one step and locked by one command at a time
hooks         commands of this machine before and after a change
"""
