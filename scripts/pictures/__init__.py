"""Parts of page_pictures.py."""
