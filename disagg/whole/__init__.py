"""OpenAI's API from the caller's side: requests to whole-request hosts, and their answers. Pure.

request    a request of ours -> path and body
answers    its answers: a streamed one -> our events, and the JSON that is read
refusals   an answer that is not 200 -> our error
"""
