"""The ServerApp: the configured method, with the run configuration of pyproject.toml and --run-config."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from pbfl_flwr.strategies import serve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation; a strategy of my own would be started here with ``strategy.start(grid)``."""
    serve(grid, context.run_config, context.run_id)
