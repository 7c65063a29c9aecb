"""OpenAI's API from the caller's side: requests to whole-request hosts, and their answers. Pure.

request    a request of ours -> path and body
answers    the JSON of its answers, as far as it is read
stream     the pieces of a streamed answer -> our events
refusals   an answer that is not 200 -> our error
"""
