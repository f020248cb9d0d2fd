//! The reference: a graph run node by node, in plain loops.
