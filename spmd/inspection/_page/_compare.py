"""What the page of two reports' differences shows, as plain values."""
from typing import Any
def view(diff: Any) -> dict[str, Any]:
    return {}
