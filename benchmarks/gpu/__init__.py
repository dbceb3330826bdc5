"""What a GPU makes of the project: exactness first, then times over what the device can do at best."""
