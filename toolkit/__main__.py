"""`python -m toolkit COMMAND` is `toolkit COMMAND`."""

from toolkit.cli.main import main

if __name__ == "__main__":
    main()
