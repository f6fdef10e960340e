"""`python -m holdfast`, and with it `accelerate launch -m holdfast train run.yaml`."""

from holdfast.cli.main import main

if __name__ == "__main__":
    main()
