"""`python -m agentfly_kit.tiny`: regenerate the shipped tasks and policies."""

from agentfly_kit.tiny import main

if __name__ == "__main__":
    main()
