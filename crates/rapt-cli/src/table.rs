//! Tables for people: a name and a text per row.

use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;

/// The rows as a table with a frame.
pub(crate) fn framed<N: AsRef<str>, T: AsRef<str>>(rows: &[(N, T)]) -> String {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    for (name, text) in rows {
        table.add_row([name.as_ref(), text.as_ref()]);
    }
    table.to_string()
}
