//! Threads for many short kernels.

/// A team of threads that runs the tasks of one operation at a time.
pub struct Pool {
    threads: usize,
}

impl Pool {
    /// A team of `threads` threads, the caller's included.
    pub fn new(threads: usize) -> Self {
        Self { threads: threads.max(1) }
    }

    /// Threads of the team.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `task(0) … task(count - 1)`, in any order and on any thread, and returns when all have run.
    pub fn run(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..count).for_each(task);
    }
}
