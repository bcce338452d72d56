"""Tool-Star's world: a policy that searches, runs Python and browses; run as toolstar.NAME."""
