//! How a request is cut into pieces.
//!
//! A *task* is one group of heads that share K and V (forward: one head, or a whole group if few queries are stacked;
//! decode: always a whole group). Its *rows* are the queries of its heads, head by head. An *item* is a run of rows
//! (forward) or a chunk of keys (decode) of one task. Rows never depend on one another, so the cut of rows may follow the
//! number of threads; the cut of keys follows `block_n` alone.

/// Tasks, rows and items of a request, and how an item reads its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Partition {
    /// Tasks.
    pub(crate) tasks: usize,
    /// Heads per task.
    pub(crate) heads: usize,
    /// Rows of one task.
    pub(crate) rows: usize,
    /// Rows per item (forward), or all rows (decode).
    pub(crate) chunk_rows: usize,
    /// Items per task.
    pub(crate) chunks: usize,
    /// The order in which items are dealt.
    pub(crate) order: Order,
    /// Keys per block.
    pub(crate) block_n: usize,
    /// Forward: whether a rest of at most one vector of rows gets a tile of one vector.
    pub(crate) narrow: bool,
    /// Decode: keys per block of the second product.
    pub(crate) pv_keys: usize,
    /// Decode: how many bytes of K or V lie between what is read and what is asked for; 0: nothing is.
    pub(crate) ahead_bytes: usize,
    /// Whether K and V are read where they lie.
    pub(crate) k_in_place: bool,
    /// As above, for V.
    pub(crate) v_in_place: bool,
}

/// One piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    pub(crate) task: usize,
    pub(crate) chunk: usize,
}

/// An item, and the one that its thread takes after it if all threads take turns. Which it is touches no bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    pub(crate) item: Item,
    pub(crate) next: Option<Item>,
}

/// The order in which the next free thread gets the next item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Task by task.
    Tasks,
    /// Task by task, of each the last chunk first: under a causal mask the last rows see the most keys. The last chunks of the last tasks
    /// come before their other chunks, so that threads end together.
    LastRows {
        /// So many tasks at the end.
        last_tasks: usize,
    },
    /// The same chunk of all tasks of one batch index in turn. Where the rows of all heads lie between one key and the next,
    /// tasks that follow one another read the same pages.
    Heads {
        /// Tasks of one batch index.
        tasks: usize,
    },
}

/// Decode: keys of one micro-tile of the first product.
pub(crate) const QK_KEYS: usize = 4;

impl Partition {
    /// Decode: the most keys that are gathered, or made numbers of, at a time.
    pub(crate) fn panel_keys(&self) -> usize {
        self.pv_keys.max(QK_KEYS)
    }

    /// Items of all tasks.
    pub(crate) fn items(&self) -> usize {
        self.tasks.saturating_mul(self.chunks)
    }

    /// The rows of an item of forward: the first, and the one behind the last.
    pub(crate) fn rows_of(&self, item: Item) -> (usize, usize) {
        let first = item.chunk * self.chunk_rows;
        (first, self.rows.min(first + self.chunk_rows))
    }

    /// Item number `n` where `threads` threads take turns.
    pub(crate) fn turn(&self, n: usize, threads: usize) -> Turn {
        let next = n + threads;
        Turn { item: self.item(n), next: (next < self.items()).then(|| self.item(next)) }
    }

    /// Item number `n`, each of `0..items` once.
    pub(crate) fn item(&self, n: usize) -> Item {
        let chunks = self.chunks;
        match self.order {
            Order::Tasks => Item { task: n / chunks, chunk: n % chunks },
            Order::LastRows { last_tasks } => {
                let first = self.tasks - last_tasks;
                let (task, chunk) = match n.checked_sub(first * chunks) {
                    None => (n / chunks, n % chunks),
                    Some(rest) => (first + rest % last_tasks, rest / last_tasks),
                };
                Item { task, chunk: chunks - 1 - chunk }
            }
            Order::Heads { tasks } => {
                let (batch, rest) = (n / (tasks * chunks), n % (tasks * chunks));
                Item { task: batch * tasks + rest % tasks, chunk: rest / tasks }
            }
        }
    }
}
