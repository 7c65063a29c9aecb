"""Why a fleet does not work, or not well: each finding a cause and the command that mends it.

gather    all that is read on one host, in a few round trips
vitals    what facts.py does not tell: GPU health, wired memory, Local Network Privacy, clock
models    which models lie on a host, whole or in part, and what identifies them
host      findings about one host; pure
pair      findings about a prefill and a decode host of one model; pure
examine   all hosts at the same time, then the links between them
"""
