"""`disagg doctor`: findings about what is wrong in a fleet, each with a hint.

gather         reads one host, in a few round trips
reach_program  connects from a host to its peers; runs on the hosts, never imported
host           all findings about one host; pure
pair           findings about a prefill and a decode host of one model; pure
examine        examines all hosts at the same time, then measures the links between them
"""
