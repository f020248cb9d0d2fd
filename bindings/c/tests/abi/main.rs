//! The functions of rapt.h, called as C calls them.

mod bad_input;
mod dtypes;
mod header;
mod reference;
mod support;
mod threads;
