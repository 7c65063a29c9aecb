"""What transformers and vLLM import of torchvision to load models that also read images. PyPI's torchvision is built
for CUDA and does not import beside PyTorch's CPU build. Nothing here reads an image: the tests give such models text.
"""

__version__ = "0.28.0"
