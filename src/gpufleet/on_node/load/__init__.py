"""Programs that load a server and measure it. `load_test/client_places.py` starts them."""
