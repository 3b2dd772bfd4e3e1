-- ARGV: worker id, incarnation, whether it is dead.
local id = ARGV[1]
local known = redis.call('HMGET', key('node:', id), 'incarnation', 'died')
if known[1] ~= ARGV[2] then return 0 end
if ARGV[3] == '1' and not known[2] then count('buried') end
redis.call('DEL', key('node:', id))
redis.call('ZREM', key('nodes'), id)
touch(id)
return 1
