"""What runs inside a sandbox. Standard library only: these files are sent in as text, or run from their path."""
