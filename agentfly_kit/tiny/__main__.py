"""`python -m agentfly_kit.tiny`: remake what ships."""

from agentfly_kit.tiny import main

if __name__ == "__main__":
    main()
