"""OpenAI's API as it is seen from the other side: what a whole-request host is asked, and what it answers. Pure.

questions  a request of ours -> path and body
answers    the JSON of its answers, as far as it is read
stream     the pieces of a streamed answer -> our events
refusals   an answer that is not 200 -> our error
"""
