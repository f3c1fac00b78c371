"""Model servers and what they serve: listed, loaded, unloaded, deployed."""
