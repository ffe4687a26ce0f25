"""Reads what a Python file imports and uses, without running it. Used by test_architecture.py."""

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """One file: its path as seen from the root of the repository, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def imports(self) -> list[tuple[ast.AST, str, str]]:
        """(node, local name, dotted name) of every import, relative ones resolved."""
        found: list[tuple[ast.AST, str, str]] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found.append((node, alias.asname or alias.name.partition(".")[0], alias.name))
            elif isinstance(node, ast.ImportFrom):
                home = self._absolute(node)
                found += [(node, alias.asname or alias.name, f"{home}.{alias.name}") for alias in node.names]
        return found

    def _absolute(self, node: ast.ImportFrom) -> str:
        package = list(Path(self.path).parent.parts)
        base = package[: len(package) - node.level + 1] if node.level else []
        return ".".join([*base, *([node.module] if node.module else [])])

    @cached_property
    def uses(self) -> list[tuple[ast.AST, str]]:
        """(node, dotted name) of every import and every attribute chain that starts at an imported name."""
        names = {}
        for node, local, dotted in self.imports:
            plain = isinstance(node, ast.Import) and local == dotted.partition(".")[0]
            names[local] = local if plain else dotted
        found = [(node, dotted) for node, _, dotted in self.imports]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                chain, start = [node.attr], node.value
                while isinstance(start, ast.Attribute):
                    chain.append(start.attr)
                    start = start.value
                if isinstance(start, ast.Name) and start.id in names:
                    found.append((node, ".".join([names[start.id], *reversed(chain)])))
        return found

    def at(self, node: ast.AST, complaint: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 0)}: {complaint}"
