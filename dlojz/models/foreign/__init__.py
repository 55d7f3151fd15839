"""Models from elsewhere, `timm:NAME`, `torchvision:NAME` or `FILE.py:FUNCTION`, wherever the catalogue's are named."""
