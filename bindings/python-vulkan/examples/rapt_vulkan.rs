//! The module `rapt_vulkan` as the tests build it: by itself, where `--lib` would build every library of the workspace.

#[path = "../src/module.rs"]
mod module;
