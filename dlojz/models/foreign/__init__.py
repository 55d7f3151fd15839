"""Models from elsewhere, wherever the catalogue's are named: timm:, torchvision:, hf:FOLDER, FILE.py:FUNCTION."""
