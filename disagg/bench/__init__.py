"""What a running fleet does under load, and whether disaggregating it pays.

workloads  what is sent: random token ids of exact counts, or the items of a file
datasets   the files: prompts, ShareGPT JSON, Mooncake traces
plan       the sweep as a list of turns: which mode runs which requests, and when each is sent. Pure
load       plays the turns against the fleet
records    what one request, and one turn, gave
energy     watts of the machines: read where they can be, else as stated
stats      from records to figures. Pure
verdict    from figures to sentences: where disaggregation wins, where it loses. Pure
result     all of it as one value, and as JSON
report     the same as one self-contained page; charts draws its plots as SVG
"""
