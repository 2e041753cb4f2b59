"""`mggcn doctor`: checks of what is installed and of which device and transport work, each with its remedy."""
