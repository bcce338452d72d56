"""The laptop's world, its exercises, and its model of 2M parameters."""
