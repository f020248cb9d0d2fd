//! `RAPT_LOG`: one line on stderr per event of rapt, silent without it.
//!
//! A whole logging framework would weigh more than this. Spans are not used by rapt and not printed.

use std::fmt::{self, Write as _};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::errors::Failure;

const ALLOWED: &str = "off, error, warn, info, debug, trace";

struct Lines {
    level: Level,
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        // A table becomes one line.
        let text = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>();
        let text = text.join("; ");
        // Writing to a String cannot fail.
        let _ = match field.name() {
            "message" => write!(self.0, " {text}"),
            name => write!(self.0, " {name}={text}"),
        };
    }
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("rapt") && *metadata.level() <= self.level
    }

    fn max_level_hint(&self) -> Option<tracing::level_filters::LevelFilter> {
        Some(self.level.into())
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(format!("rapt {}", event.metadata().level()));
        event.record(&mut line);
        eprintln!("{}", line.0);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Reads `RAPT_LOG` once, when the module is loaded.
pub(crate) fn start() -> Result<(), Failure> {
    let Ok(text) = std::env::var("RAPT_LOG") else { return Ok(()) };
    let level = match text.trim().to_ascii_lowercase().as_str() {
        "" | "off" => return Ok(()),
        text => text.parse::<Level>().map_err(|_| Failure::option("RAPT_LOG", format!("{text:?}"), ALLOWED))?,
    };
    // Another subscriber in the process was there first: it stays.
    let _ = tracing::subscriber::set_global_default(Lines { level });
    Ok(())
}
