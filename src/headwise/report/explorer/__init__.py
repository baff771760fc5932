"""The plan explorer: a page whose sliders ask the one solver."""
