"""The verifier: named rules that every program is checked against before it is compiled."""
