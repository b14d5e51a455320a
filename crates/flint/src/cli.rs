//! One file for each command.

pub(crate) mod bench;
pub(crate) mod chat;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod pack;
pub(crate) mod plan;
pub(crate) mod serve;
pub(crate) mod verify;
