"""The plan explorer: a profile enters, a page with sliders leaves, served or saved."""
