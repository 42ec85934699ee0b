"""`hatrack completion`: the script that lets a shell complete hatrack's words."""

import click
from click.shell_completion import get_completion_class

from hatrack.cli.group import PROGRAM

VARIABLE = f"_{PROGRAM.upper()}_COMPLETE"  # by which the script asks the program


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="bash|zsh|fish")
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the script that completes hatrack's words in a shell.

    It completes commands, names and the options that all runs share. Put it where the shell looks for such scripts, and
    open a new shell:

    \b
    bash: hatrack completion bash > ~/.local/share/bash-completion/completions/hatrack
    zsh:  hatrack completion zsh > ~/.zfunc/_hatrack
          (~/.zfunc must be in fpath: "fpath+=~/.zfunc" in ~/.zshrc, before compinit)
    fish: hatrack completion fish > ~/.config/fish/completions/hatrack.fish

    For the present shell alone: eval "$(hatrack completion bash)"
    """
    kind = get_completion_class(shell)
    assert kind is not None
    print(kind(ctx.find_root().command, {}, PROGRAM, VARIABLE).source())
