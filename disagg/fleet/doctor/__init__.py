"""Why a fleet does not work, or not well: each finding a cause and the command that mends it.

gather    all that is read on one host, in a few round trips
hardware  findings about disk, memory and GPU; pure
host      all findings about one host; pure
pair      findings about a prefill and a decode host of one model; pure
examine   all hosts at the same time, then the links between them
"""
