"""`python -m recipes`: regenerate the shipped tasks and policies."""

from recipes import main

if __name__ == "__main__":
    main()
