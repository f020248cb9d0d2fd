//! How the subcommands of `rapt layout` print: text, or JSON with `--json`.

use clap::Args as ClapArgs;
use serde_json::Value;

use crate::{Outcome, exit, say};

#[derive(ClapArgs, Debug)]
pub(super) struct JsonArgs {
    /// JSON instead of text.
    #[arg(long)]
    pub(super) json: bool,
}

/// Text, or JSON with --json.
pub(super) fn print(args: &JsonArgs, value: &Value, text: impl FnOnce() -> String) -> Outcome {
    if args.json {
        say(&format_args!("{value:#}"))?;
    } else {
        say(&text())?;
    }
    Ok(exit::OK)
}
