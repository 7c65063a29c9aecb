"""A model as its checkpoint describes it. Of the frameworks, only transformers' configs and tokenizers are imported.

architectures/    what each architecture keeps between tokens
reference         a checkpoint: found, checked, and what it describes, with which loaded models are compared
profile           layers, windows and rotary frequencies: what an engine computes, and whether two compute the same
rope              reference rotary frequencies, from the configuration
evidence          what a loaded engine finds likeliest after a fixed text
prefix_cache      KV of finished requests, found by the tokens of a new one; prefix_tree: its nodes
text              prompts -> token ids; stream: token ids -> text, with stop strings, and the bytes of one token
fill              the marks around a gap that a model fills
format            how a model marks reasoning, calls of tools and channels
bans              which tokens may not come next in an answer
constraint        which tokens may come next in an answer that must have a form; matchers: the processes that find out
draw              the random numbers of sampling, the same in every framework
"""
