"""The ServerApp of every method."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from pbfl_flwr.flower.server.app import serve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method's strategy."""
    serve(grid, context.run_config, context.run_id)
